"""Models, strategies and clusters of Proteus (Duan et al., TPDS 2024), predicted with and without interference."""
