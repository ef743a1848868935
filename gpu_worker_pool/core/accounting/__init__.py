"""Fair share: what owners used lately."""
