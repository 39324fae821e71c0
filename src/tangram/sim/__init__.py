"""The scheduler on virtual time: compare policies, replay traces, size pools."""
