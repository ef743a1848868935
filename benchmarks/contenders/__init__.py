"""What people would use instead, each in a file of its own behind the interface of contender.py."""
