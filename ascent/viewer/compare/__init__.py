"""Several runs side by side: settings that differ, curves with intervals over seeds, how they ended."""
