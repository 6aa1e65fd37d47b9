"""Rounds that go on without those who are late or gone."""
