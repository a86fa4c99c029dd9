"""How the search does: programs, their muGraphs, time and memory, and what its parts are worth."""
