"""Ground: settings, processes, names, results, journal, locks, jobs. Knows no model, no cloud."""
