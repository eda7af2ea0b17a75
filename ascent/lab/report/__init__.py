"""`ascent report`: a run as one HTML file without scripts."""
