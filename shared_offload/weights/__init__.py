"""Where weights enter: checkpoint files, their index, layout and formats."""
