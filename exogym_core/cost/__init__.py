"""Virtual time of computing steps, of codecs and of updates."""
