"""J and T for Hopper GPUs, in Gluon: asynchronous warpgroup products, bulk copies, two stages of tiles in flight."""
