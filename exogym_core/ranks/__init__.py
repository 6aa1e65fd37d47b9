"""Where ranks run: threads of this process, or processes."""
