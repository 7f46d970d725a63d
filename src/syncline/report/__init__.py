"""Plans as text: ``draw.draw_plan``."""
