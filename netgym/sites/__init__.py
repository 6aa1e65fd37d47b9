"""Elastic runs: sites that come and go, and the rendezvous at which they meet."""
