"""What a finished run is looked at with: curves, the final table, a sample before and after."""
