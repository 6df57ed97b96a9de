"""The lease's promise under attack: many processes, real faults, and a judge that knows nothing but the records."""
