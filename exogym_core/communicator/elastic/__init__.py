"""Sites that come and go: what they do together goes on among those who are there."""
