"""kopf registrations, and nothing else: they fill the cache and wake the work queue."""
