"""A run as one HTML file without script, to send to a colleague: `ascent report`."""
