"""Small shared memories in which agents and workers find each other."""
