"""`tunewell cache`: show what tunewell and the model hub keep on this disk, with sizes, and delete it by kind."""
