"""Reports drawn: as terminal text and as one HTML page."""
