"""Models on held-out problems: how often they are right, and how sure that is."""
