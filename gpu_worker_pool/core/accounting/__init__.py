"""What leases come to: GPU time by owner, and who held what when."""
