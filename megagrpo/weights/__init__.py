"""Which part of which tensor is where? Every side describes its boxes; plans say what moves between sides."""
