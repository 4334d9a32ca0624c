"""The dashboard: one live page that works offline, fed by server-sent events."""
