"""What `apps/faults.py` is made of: disturbed jobs, the kinds of faults, the judgement of what came out."""
