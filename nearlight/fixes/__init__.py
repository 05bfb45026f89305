"""The main job: fixes applied one by one, proved, and held against their promise."""
