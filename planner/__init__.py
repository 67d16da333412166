"""The planner: searches policies, prices them by replay and writes plans."""
