"""Where sites that come and go meet: what is decided, and the process that decides it."""
