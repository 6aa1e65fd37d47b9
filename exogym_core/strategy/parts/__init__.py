"""Pieces that strategies are composed of: pure, small, with explicit state."""
