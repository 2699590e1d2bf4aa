"""The Metal dialect: its pre-pass and its lint."""
