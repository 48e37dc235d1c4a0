! pmm3d from Fortran: compile this file with the program's own compiler, and link with -lpmm3d.
!
! The head of pmm3d.h has the rules for errors, the order of calls and threads. In Fortran a communicator is an integer
! (with mpi_f08: comm%mpi_val), texts have any length, and a shard stored by columns has the order 'F'. Integers are C's
! int: in a program compiled with -i8 or -fdefault-integer-8, declare them integer(c_int), or the compiler refuses them.
! Arguments of type(*) have the type of the matrices.
module pmm3d
    use, intrinsic :: iso_c_binding, only: c_char, c_int, c_int64_t, c_null_char, c_signed_char
    implicit none
    private
    public :: pmm3d_start, pmm3d_finalize, pmm3d_last_error, pmm3d_error_everywhere, pmm3d_grid, pmm3d_grid_shape, &
              pmm3d_box, pmm3d_matrix, pmm3d_matmul, pmm3d_redistribute, pmm3d_free, pmm3d_context, &
              pmm3d_pgemm, pmm3d_pgemr2d, pmm3d_from_block_cyclic, pmm3d_to_block_cyclic, pmm3d_from_blocks, &
              pmm3d_to_blocks, pmm3d_plan, pmm3d_multiply

    integer(c_int), parameter, public :: PMM3D_OK = 0, PMM3D_ERROR_ARGUMENT = 1, PMM3D_ERROR_DISAGREEMENT = 2, &
        PMM3D_ERROR_MEMORY = 3, PMM3D_ERROR_MPI = 4, PMM3D_ERROR_PYTHON = 5, PMM3D_ERROR_THREAD = 6, &
        PMM3D_ERROR_OTHER = 8

    interface
        integer(c_int) function pmm3d_start() bind(C)
            import :: c_int
        end function

        integer(c_int) function pmm3d_finalize() bind(C)
            import :: c_int
        end function

        integer(c_int) function pmm3d_error_everywhere() bind(C)
            import :: c_int
        end function

        integer(c_int) function pmm3d_grid(comm, gx, gy, gz, grid) bind(C, name="pmm3d_grid_f")
            import :: c_int
            integer(c_int), value :: comm, gx, gy, gz
            integer(c_int), intent(out) :: grid
        end function

        integer(c_int) function pmm3d_grid_shape(grid, shape) bind(C)
            import :: c_int
            integer(c_int), value :: grid
            integer(c_int), intent(out) :: shape(3)
        end function

        integer(c_int) function pmm3d_multiply(plan) bind(C)
            import :: c_int
            integer(c_int), value :: plan
        end function

        integer(c_int) function pmm3d_redistribute(source, target) bind(C)
            import :: c_int
            integer(c_int), value :: source, target
        end function

        integer(c_int) function pmm3d_from_block_cyclic(context, a, desca, matrix) bind(C)
            import :: c_int
            integer(c_int), value :: context, matrix
            type(*), intent(in) :: a(*)
            integer(c_int), intent(in) :: desca(9)
        end function

        integer(c_int) function pmm3d_to_block_cyclic(matrix, context, a, desca) bind(C)
            import :: c_int
            integer(c_int), value :: matrix, context
            type(*) :: a(*)
            integer(c_int), intent(in) :: desca(9)
        end function

        integer(c_int) function pmm3d_free(object) bind(C)
            import :: c_int
            integer(c_int), intent(inout) :: object
        end function
    end interface

    interface
        integer(c_int) function last_error(text, size) bind(C, name="pmm3d_last_error")
            import :: c_char, c_int
            character(kind=c_char), intent(out) :: text(*)
            integer(c_int), value :: size
        end function

        integer(c_int) function box_in_c(grid, layout, rows, columns, box) bind(C, name="pmm3d_box")
            import :: c_char, c_int, c_int64_t
            integer(c_int), value :: grid
            character(kind=c_char), intent(in) :: layout(*)
            integer(c_int64_t), value :: rows, columns
            integer(c_int64_t), intent(out) :: box(4)
        end function

        ! Characters are passed by value as small integers: gfortran 12 passes a dummy character argument wrongly.
        integer(c_int) function matmul_in_c(transa, transb, alpha, a, b, beta, c) bind(C, name="pmm3d_matmul")
            import :: c_int, c_signed_char
            integer(c_signed_char), value :: transa, transb
            type(*), intent(in) :: alpha, beta
            integer(c_int), value :: a, b, c
        end function

        integer(c_int) function plan_in_c(transa, transb, alpha, a, b, beta, c, plan) bind(C, name="pmm3d_plan")
            import :: c_int, c_signed_char
            integer(c_signed_char), value :: transa, transb
            type(*), intent(in) :: alpha, beta
            integer(c_int), value :: a, b, c
            integer(c_int), intent(out) :: plan
        end function

        integer(c_int) function context_in_c(comm, rows, columns, order, context) bind(C, name="pmm3d_context_f")
            import :: c_int, c_signed_char
            integer(c_int), value :: comm, rows, columns
            integer(c_signed_char), value :: order
            integer(c_int), intent(out) :: context
        end function

        integer(c_int) function pgemm_in_c(context, type, transa, transb, m, n, k, alpha, a, ia, ja, desca, b, ib, jb, &
                                           descb, beta, c, ic, jc, descc) bind(C, name="pmm3d_pgemm")
            import :: c_int, c_signed_char
            integer(c_int), value :: context, m, n, k, ia, ja, ib, jb, ic, jc
            integer(c_signed_char), value :: type, transa, transb
            type(*), intent(in) :: alpha, beta, a(*), b(*)
            type(*) :: c(*)
            integer(c_int), intent(in) :: desca(9), descb(9), descc(9)
        end function

        integer(c_int) function pgemr2d_in_c(type, m, n, a, ia, ja, desca, contexta, b, ib, jb, descb, contextb) &
                bind(C, name="pmm3d_pgemr2d")
            import :: c_int, c_signed_char
            integer(c_int), value :: m, n, ia, ja, contexta, ib, jb, contextb
            integer(c_signed_char), value :: type
            type(*), intent(in) :: a(*)
            type(*) :: b(*)
            integer(c_int), intent(in) :: desca(9), descb(9)
        end function

        integer(c_int) function from_blocks_in_c(block, box, order, matrix) bind(C, name="pmm3d_from_blocks")
            import :: c_int, c_int64_t, c_signed_char
            type(*), intent(in) :: block(*)
            integer(c_int64_t), intent(in) :: box(4)
            integer(c_signed_char), value :: order
            integer(c_int), value :: matrix
        end function

        integer(c_int) function to_blocks_in_c(matrix, block, box, order) bind(C, name="pmm3d_to_blocks")
            import :: c_int, c_int64_t, c_signed_char
            integer(c_int), value :: matrix
            type(*) :: block(*)
            integer(c_int64_t), intent(in) :: box(4)
            integer(c_signed_char), value :: order
        end function

        integer(c_int) function matrix_in_c(grid, type, rows, columns, layout, order, shard, matrix) &
                bind(C, name="pmm3d_matrix")
            import :: c_char, c_int, c_int64_t, c_signed_char
            integer(c_int), value :: grid
            integer(c_signed_char), value :: type, order
            integer(c_int64_t), value :: rows, columns
            character(kind=c_char), intent(in) :: layout(*)
            type(*), intent(in) :: shard(*)
            integer(c_int), intent(out) :: matrix
        end function
    end interface

contains

    ! The text of the last error that a call returned.
    function pmm3d_last_error() result(text)
        character(len=:), allocatable :: text
        character(kind=c_char) :: nothing(1)
        character(kind=c_char), allocatable :: found(:)
        integer :: length, i
        length = last_error(nothing, 1_c_int)
        allocate (found(length))
        length = last_error(found, int(length, c_int))
        allocate (character(len=size(found) - 1) :: text)
        do i = 1, len(text)
            text(i:i) = found(i)
        end do
    end function

    ! Return this rank's shard: rows box(1) to box(2) and columns box(3) to box(4), counted from 1, the ends included.
    integer(c_int) function pmm3d_box(grid, layout, rows, columns, box) result(code)
        integer(c_int), intent(in) :: grid, rows, columns
        character(len=*), intent(in) :: layout
        integer(c_int), intent(out) :: box(4)
        integer(c_int64_t) :: found(4)
        code = box_in_c(grid, trim(layout)//c_null_char, int(rows, c_int64_t), int(columns, c_int64_t), found)
        box = 0
        if (code == PMM3D_OK) box = int(found) + [1, 0, 1, 0]
    end function

    ! type is that of the shard: 's', 'd', 'c' or 'z'. The shard is used in place: give it the attribute target.
    integer(c_int) function pmm3d_matrix(grid, type, rows, columns, layout, order, shard, matrix) result(code)
        integer(c_int), intent(in) :: grid, rows, columns
        character, intent(in) :: type, order
        character(len=*), intent(in) :: layout
        type(*), intent(in), target :: shard(*)
        integer(c_int), intent(out) :: matrix
        code = matrix_in_c(grid, as_char(type), int(rows, c_int64_t), int(columns, c_int64_t), &
                           trim(layout)//c_null_char, as_char(order), shard, matrix)
    end function

    ! C = alpha op(A) op(B) + beta C. alpha and beta have the type of the matrices.
    integer(c_int) function pmm3d_matmul(transa, transb, alpha, a, b, beta, c) result(code)
        character, intent(in) :: transa, transb
        type(*), intent(in) :: alpha, beta
        integer(c_int), intent(in) :: a, b, c
        code = matmul_in_c(as_char(transa), as_char(transb), alpha, a, b, beta, c)
    end function

    ! Plan the same product. pmm3d_multiply(plan) runs it.
    integer(c_int) function pmm3d_plan(transa, transb, alpha, a, b, beta, c, plan) result(code)
        character, intent(in) :: transa, transb
        type(*), intent(in) :: alpha, beta
        integer(c_int), intent(in) :: a, b, c
        integer(c_int), intent(out) :: plan
        code = plan_in_c(as_char(transa), as_char(transb), alpha, a, b, beta, c, plan)
    end function

    integer(c_int) function pmm3d_context(comm, rows, columns, order, context) result(code)
        integer(c_int), intent(in) :: comm, rows, columns
        character, intent(in) :: order
        integer(c_int), intent(out) :: context
        code = context_in_c(comm, rows, columns, as_char(order), context)
    end function

    integer(c_int) function pmm3d_pgemm(context, type, transa, transb, m, n, k, alpha, a, ia, ja, desca, b, ib, jb, &
                                        descb, beta, c, ic, jc, descc) result(code)
        integer(c_int), intent(in) :: context, m, n, k, ia, ja, ib, jb, ic, jc, desca(9), descb(9), descc(9)
        character, intent(in) :: type, transa, transb
        type(*), intent(in) :: alpha, beta, a(*), b(*)
        type(*) :: c(*)
        code = pgemm_in_c(context, as_char(type), as_char(transa), as_char(transb), m, n, k, alpha, a, ia, ja, desca, &
                          b, ib, jb, descb, beta, c, ic, jc, descc)
    end function

    integer(c_int) function pmm3d_pgemr2d(type, m, n, a, ia, ja, desca, contexta, b, ib, jb, descb, contextb) &
            result(code)
        integer(c_int), intent(in) :: m, n, ia, ja, contexta, ib, jb, contextb, desca(9), descb(9)
        character, intent(in) :: type
        type(*), intent(in) :: a(*)
        type(*) :: b(*)
        code = pgemr2d_in_c(as_char(type), m, n, a, ia, ja, desca, contexta, b, ib, jb, descb, contextb)
    end function

    ! matrix = blocks. This rank's block: rows box(1) to box(2) and columns box(3) to box(4), counted from 1, the ends
    ! included. The end of an empty block is its beginning minus 1.
    integer(c_int) function pmm3d_from_blocks(block, box, order, matrix) result(code)
        type(*), intent(in) :: block(*)
        integer(c_int), intent(in) :: box(4), matrix
        character, intent(in) :: order
        code = from_blocks_in_c(block, int(box, c_int64_t) - [1, 0, 1, 0], as_char(order), matrix)
    end function

    ! blocks = matrix, otherwise as pmm3d_from_blocks.
    integer(c_int) function pmm3d_to_blocks(matrix, block, box, order) result(code)
        integer(c_int), intent(in) :: matrix, box(4)
        type(*) :: block(*)
        character, intent(in) :: order
        code = to_blocks_in_c(matrix, block, int(box, c_int64_t) - [1, 0, 1, 0], as_char(order))
    end function

    integer(c_signed_char) function as_char(letter)
        character, intent(in) :: letter
        as_char = int(ichar(letter), c_signed_char)
    end function
end module
