"""Sites: ranks that act as one participant between sites."""
