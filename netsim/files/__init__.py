"""Files that users write: units, YAML read safely with its lines, and how mistakes are told."""
