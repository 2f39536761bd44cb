"""What a run says about itself: records and their sinks, the terminal view, the watchdog, the summary. No torch."""
