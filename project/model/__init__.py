"""WHAT is trained: the network, its schedule, and the LightningModule around them. Replace these with your own."""
