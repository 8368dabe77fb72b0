"""ON WHAT it is trained: the images, their cache, the batches and the LightningDataModule. Replace with your own."""
