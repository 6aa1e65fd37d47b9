"""Files that users write: units, YAML read safely with its lines, and reports of errors in them."""
