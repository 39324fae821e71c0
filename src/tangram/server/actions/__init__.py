"""Actions of tenants: from a decoded request to the orchestrator."""
