"""How weights flow: units of an arena into slots on the GPU, ordered by events."""
