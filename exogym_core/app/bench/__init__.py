"""The benchmark: fixed tasks, networks and seeds; virtual seconds and bytes to a target loss."""
