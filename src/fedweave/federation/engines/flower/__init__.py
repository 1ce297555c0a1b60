"""FedWeave on Flower: the same rounds and the same client code, with a network in between."""
