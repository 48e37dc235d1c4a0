"""What `apps/plan_bench.py` is made of: predictions of the planner beside measurements."""
