"""From the files that the hosts' tools wrote to tables and figures."""
