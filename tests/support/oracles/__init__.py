"""What the library is tested against: the definitions of papers and other libraries in NumPy,
float64, one token at a time. Nothing here uses the library.
"""
