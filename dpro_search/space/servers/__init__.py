"""Jobs with parameter servers (MXNet's KVStore, BytePS): what a trace holds about them, and their replay graphs."""
