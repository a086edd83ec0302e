"""Where weights live: arenas of pinned host memory, private or shared between processes."""
