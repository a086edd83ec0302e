"""Training of the demo model; see docs/demo-model.md."""
