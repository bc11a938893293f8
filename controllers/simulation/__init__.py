"""The real driver, schedules and ledgers on simulated workers: what a call takes is computed by a cost model, and the clock is its own."""
