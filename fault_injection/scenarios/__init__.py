"""Public bugs of serving engines, each replayed with its own mechanism at its smallest input."""
