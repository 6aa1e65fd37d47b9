"""What steps and codecs cost in virtual time."""
