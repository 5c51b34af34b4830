"""Jobs that come and go while others run: pages of a pool, the cache that lies in them, and the batch."""
