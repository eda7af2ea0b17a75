"""The lab: a local web page with lessons and five live figures, computed by the library itself (`ascent lab`)."""
