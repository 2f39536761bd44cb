"""Reports on finished runs: curves, the final table, a sample before and after training, and the HTML report."""
