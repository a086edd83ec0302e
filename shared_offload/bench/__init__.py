"""Measurements a user can repeat on their own host."""
